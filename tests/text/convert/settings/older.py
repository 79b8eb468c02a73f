"""Settings of families of older decoders."""

from tests.text.convert.settings.kinds import Settings

SETTINGS: dict[str, tuple[Settings, Settings]] = {}
