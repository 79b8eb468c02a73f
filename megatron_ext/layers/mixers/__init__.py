"""Sequence mixers other than attention: recurrent layers and sparse attention."""
