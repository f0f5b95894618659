"""`python -m sluice.daemon`: the same as the console script."""

from sluice.daemon.cli import main

if __name__ == "__main__":
    main()
