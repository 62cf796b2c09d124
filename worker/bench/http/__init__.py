"""`adcascade bench http`: `adcascade serve` and a plain aiohttp handler that answers a constant, under the same loop.

Servers and the client are processes of their own.
"""

from worker.bench.http.comparison import FIGURES, measure

__all__ = ["FIGURES", "measure"]
