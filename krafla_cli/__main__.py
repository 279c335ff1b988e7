"""``python -m krafla_cli`` is the same as ``mlb``."""

from krafla_cli.cli import main

if __name__ == "__main__":
    main()
