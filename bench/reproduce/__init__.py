"""Every figure and table of the papers as one command. Started by scripts/reproduce.sh."""
