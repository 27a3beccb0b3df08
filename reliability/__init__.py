"""What slimbayes is trusted with, measured: faults, hostile files, generated cases, statistics.

Each module measures one part and writes ``reliability/results/PART.json``; ``python docs/generate.py`` makes the tables
of docs/reliability.md of these files. ``make reliability`` runs them all.
"""
