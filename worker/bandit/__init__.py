"""The decision core: click models, planning, bonuses, policies, estimators, regret.

Only numpy. No I/O, no clock, no codec, no global random state: seeds and numbers come in as arguments.
"""

from worker.bandit.additive import AdditiveModel
from worker.bandit.click_model import ClickModel
from worker.bandit.personal import PersonalModel

#: The click models by name. A new model is one file, and one name here.
MODELS: dict[str, type[ClickModel]] = {model.name: model for model in (PersonalModel, AdditiveModel)}
