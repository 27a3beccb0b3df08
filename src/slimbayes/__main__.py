"""``python -m slimbayes``: the command line."""

from slimbayes.cli import main

if __name__ == "__main__":
    main()
