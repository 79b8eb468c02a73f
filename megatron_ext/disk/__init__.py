"""Reads files that strangers may have written, and writes files where strangers may have been."""
