"""config.json of anyone's model in the words of the class that computes it."""

from collections.abc import Mapping
from typing import Any

from modeling.config import FAMILIES
from modeling.families.family import family_of


def text_model(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """config.json with the model_type of our family; as it is where that is one of ours already, or unknown.

    So are read files whose model_type is another name of the family's class (``Family.model_types``).
    """
    name = content.get("model_type")
    if name in FAMILIES:
        return content
    for ours in FAMILIES:
        if name in family_of(ours).model_types:
            return {**content, "model_type": ours}
    return content
