"""The configuration of a run: frozen dataclasses, one for each concern, and their flags."""
