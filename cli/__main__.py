"""`python -m moebus.cli`, the same as the `moebus` command."""

from moebus.cli.entry import run

if __name__ == "__main__":
    run()
