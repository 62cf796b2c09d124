"""The click models by name. A new model is one file, and one line here."""

from __future__ import annotations

from worker.bandit.additive import AdditiveModel
from worker.bandit.click_model import ClickModel

MODELS: dict[str, type[ClickModel]] = {AdditiveModel.name: AdditiveModel}
