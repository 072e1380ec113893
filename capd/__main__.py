"""`python -m capd`: the same as the `capd` command."""

from capd.cli.app import main

if __name__ == "__main__":
    main()
