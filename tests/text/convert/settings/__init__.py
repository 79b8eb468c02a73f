"""Two odd settings of each family: entries of config.json beyond `models.SIZES`.

Odd are heads that do not divide the hidden size, a single key head, tied or untied embeddings,
windows, biases: settings in which a mistake in the order of rows or in a size shows.
"""

from tests.text.convert.settings import dense, experts, first, mamba, mixers, older
from tests.text.convert.settings.kinds import Settings

SETTINGS: dict[str, tuple[Settings, Settings]] = {
    **first.SETTINGS,
    **dense.SETTINGS,
    **experts.SETTINGS,
    **older.SETTINGS,
    **mixers.SETTINGS,
    **mamba.SETTINGS,
}
"""The settings by `model_type`."""
