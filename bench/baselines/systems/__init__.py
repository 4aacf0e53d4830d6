"""The systems: `run_NAME.py` measures, `convert_NAME.py` makes a system's own files."""
