"""The status page: its document, its figures, and the files of the page.

It reads snapshots of the metrics and changes nothing.
"""
