"""Errors that gnnc raises for its users: each message says what, where, and what to do."""


class GnncError(Exception):
    """Base of all errors that gnnc raises for its users."""


class CaptureError(GnncError):
    """The model could not be traced into a graph; names the line of the model and the way out."""


class UnsupportedError(GnncError):
    """A known request (precision, option, mode) that this version or backend does not have."""


class GraphError(GnncError):
    """A graph argument (edge_index, batch, adjacency) is not a valid graph."""


class InputError(GnncError):
    """An argument other than the graph is missing or has the wrong shape, dtype or device."""


class PrecisionError(GnncError):
    """A precision name or an override that means nothing, or a scale that is not finite."""


class BackendError(GnncError):
    """A backend is missing, or has no kernel where one is required."""


class VerifyError(GnncError):
    """A graph breaks an invariant of its stage: a bug in a pass, not in the user's model."""
