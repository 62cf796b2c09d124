"""The click models by name. A new model is one file, and one line here."""

from __future__ import annotations

from worker.bandit.additive import AdditiveModel
from worker.bandit.click_model import ClickModel
from worker.bandit.personal import PersonalModel

MODELS: dict[str, type[ClickModel]] = {model.name: model for model in (PersonalModel, AdditiveModel)}
