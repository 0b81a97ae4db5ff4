"""Table of contents: which task follows which, the configuration, and the command line."""
