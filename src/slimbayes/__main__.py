"""``python -m slimbayes``: the command line."""

from slimbayes.lab.cli import main

if __name__ == "__main__":
    main()
