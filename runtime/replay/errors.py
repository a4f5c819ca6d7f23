"""Why something cannot be replayed and runs eagerly instead."""

from __future__ import annotations


class NotReplayable(Exception):
    """The reason, as a clause for a warning: what was found, in the model's or the code's own terms."""
