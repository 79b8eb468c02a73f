"""Settings of families of dense decoders."""

from tests.text.convert.settings.kinds import Settings

SETTINGS: dict[str, tuple[Settings, Settings]] = {}
