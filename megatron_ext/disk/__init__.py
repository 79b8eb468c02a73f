"""Reads untrusted files, and writes into folders where other users may have placed links."""
