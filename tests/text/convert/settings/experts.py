"""Settings of families of decoders with experts."""

from tests.text.convert.settings.kinds import Settings

SETTINGS: dict[str, tuple[Settings, Settings]] = {}
