"""The model hub: asked once and briefly, where Transformers would try for half a minute before it says so."""

from __future__ import annotations

import functools
import threading

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

from ddaudit.runtime.errors import RunError

_PATIENCE_S = 4.0


@functools.cache
def why_offline(name: str) -> str:
    """Why the hub does not answer for the model `name`; empty where it does. Nothing is downloaded.

    Raises:
        RunError: where it answers that there is no such model.
    """
    found = [f"TimeoutError: no answer in {_PATIENCE_S:g} s"]

    def ask() -> None:
        try:
            HfApi().model_info(name, timeout=_PATIENCE_S)
        except RepositoryNotFoundError:
            found[0] = "absent"
        except HfHubHTTPError:
            found[0] = ""  # an answer all the same: what is wrong shows when the files are asked for
        except Exception as error:
            found[0] = f"{type(error).__name__}: {error}".splitlines()[0]
        else:
            found[0] = ""

    # Looking up the address has no time limit of its own.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_PATIENCE_S)
    if found[0] == "absent":
        raise RunError(
            f"`{name}` is no folder here, and the hub has no such model, or not for you",
            "check the name; for a private or gated one: `hf auth login`",
        )
    return found[0]


def not_cached(name: str) -> RunError:
    """The error where the hub does not answer, and the files that it has sent before do not do."""
    return RunError(
        f"`{name}` is no folder here, the hub does not answer ({why_offline(name)}), "
        "and its local cache does not have all of it",
        "check the connection, or name a folder that holds the checkpoint; built-in profiles, such as `tiny-hybrid` "
        "with `--random-weights`, need no download",
    )
