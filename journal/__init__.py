"""What survives the process: the SQLite journal and the undo files."""
