"""Events of the library's streams, of which a CPU has none."""


class EventHandle:
    pass


class EventOverlap:
    def __init__(self, event: EventHandle | None = None) -> None:
        self.event = event

    def current_stream_wait(self) -> None:
        pass
