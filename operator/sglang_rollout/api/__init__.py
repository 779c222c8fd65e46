"""The SGLangRollout resource: models, admission rules, status, and the CRD made from them."""

from .conditions import Condition, ConditionType, find_condition, with_condition
from .group import API_VERSION, CRD_NAME, GROUP, KIND, PLURAL, VERSION
from .rollout import SGLangRollout, Spec
from .status import EngineStatus, Status, WeightsStatus
from .support import UnsupportedField, unsupported_fields

__all__ = [
    "API_VERSION",
    "CRD_NAME",
    "GROUP",
    "KIND",
    "PLURAL",
    "VERSION",
    "Condition",
    "ConditionType",
    "EngineStatus",
    "SGLangRollout",
    "Spec",
    "Status",
    "UnsupportedField",
    "WeightsStatus",
    "find_condition",
    "unsupported_fields",
    "with_condition",
]
