"""The batches of a run before the run: what is trained, token by token, as the trainer sees it.

collect.py (the trainer's loaders to rows) -> documents.py (rows to documents and their targets) ->
summary.py (totals) and checks.py (what looks wrong) -> pieces.py (ids to text) -> text.py, html.py
"""
