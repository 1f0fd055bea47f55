"""The rows of the audit, a module for each note."""
