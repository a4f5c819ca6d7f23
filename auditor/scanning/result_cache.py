"""Results of earlier scans, kept on disk: given again for the same bytes, settings and rules, and for no others."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import tempfile
from dataclasses import asdict
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddaudit.auditor.claim import Ask, Claim
from ddaudit.auditor.finding import Applicability, Confidence, Edit, Finding, Fix, Import, Severity, Span
from ddaudit.auditor.scanning.result import ScanResult
from ddaudit.auditor.sources.source import Listed, Skipped, SkipReason, SourceFile

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


PACKAGE = Path(__file__).parents[2]
MAX_BYTES = 64 * 1024 * 1024
MAX_ENTRIES = 200
SUFFIX = ".json"
# What another run of the same scan may not come to.
PASSING = frozenset({SkipReason.UNREADABLE, SkipReason.TIMEOUT, SkipReason.CRASH})


def default_folder() -> Path | None:
    """Where this platform keeps caches; None where the user has no home."""
    try:
        if sys.platform == "win32":
            return Path(os.environ["LOCALAPPDATA"]) / "ddaudit" / "cache"
        if sys.platform == "darwin":
            return Path.home() / "Library" / "Caches" / "ddaudit"
        # The specification has a relative path ignored.
        named = Path(os.environ.get("XDG_CACHE_HOME", ""))
        return (named if named.is_absolute() else Path.home() / ".cache") / "ddaudit"
    except (KeyError, RuntimeError):
        return None


class ResultCache:
    """A folder of results. What cannot be read or written there is as if it were not there: never an error."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def result(
        self, scan: Callable[[], ScanResult], files: Mapping[str, SourceFile | Listed], settings: Mapping[str, Any]
    ) -> ScanResult:
        """The result of `scan`, run if it is not known for these files and settings."""
        key = key_of(files, settings)
        if key is None:
            return scan()
        known = self.load(key)
        if known is not None:
            return known
        result = scan()
        # A file that changed between the two is found by neither key.
        if not any(entry.reason in PASSING for entry in result.skipped) and key_of(files, settings) == key:
            self.store(key, result)
        return result

    def load(self, key: str) -> ScanResult | None:
        place = self.folder / (key + SUFFIX)
        try:
            digest, _, text = place.read_text(encoding="ascii").partition("\n")
            if digest != _digest(text):
                return None
            result = _result(json.loads(text))
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None
        with contextlib.suppress(OSError):
            os.utime(place)
        return result

    def store(self, key: str, result: ScanResult) -> None:
        record = {
            "findings": [asdict(finding) for finding in result.findings],
            "suppressed": [asdict(finding) for finding in result.suppressed],
            "skipped": [asdict(entry) for entry in result.skipped],
            "num_scanned": result.num_scanned,
            "limits": list(result.limits),
        }
        text = json.dumps(record)
        new = ""
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            handle, new = tempfile.mkstemp(dir=self.folder, prefix=".new-")
            with open(handle, "w", encoding="ascii") as stream:
                stream.write(f"{_digest(text)}\n{text}")
            os.replace(new, self.folder / (key + SUFFIX))
            self._prune()
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(new)

    def _prune(self) -> None:
        """Let the results go that were used longest ago, beyond the bounds; and what an interrupted run left."""
        found = [(entry.stat(), entry) for entry in self.folder.iterdir() if entry.name.endswith(SUFFIX)]
        size = 0
        for i, (status, entry) in enumerate(sorted(found, key=lambda item: item[0].st_mtime_ns, reverse=True)):
            size += status.st_size
            if i and (i >= MAX_ENTRIES or size > MAX_BYTES):
                entry.unlink()


def key_of(files: Mapping[str, SourceFile | Listed], settings: Mapping[str, Any]) -> str | None:
    """Names one scan: by every file's path and bytes, the settings, this tool's code, and Python; None where a file
    cannot be read."""
    total = hashlib.sha256(json.dumps([tool_digest(), settings], sort_keys=True).encode())
    for name, file in sorted(files.items()):
        try:
            data = file.encode() if isinstance(file, SourceFile) else file.file.read_bytes()
        except OSError:
            return None
        total.update(json.dumps([name, len(data)]).encode())
        total.update(data)
    return total.hexdigest()


@cache
def tool_digest() -> str:
    """Of the tool's own files, as they are, and of what they run on."""
    try:
        parser = version("libcst")
    except PackageNotFoundError:
        parser = ""
    total = hashlib.sha256(json.dumps([sys.version, sys.platform, parser]).encode())
    for folder in ("auditor", "rules"):
        for file in sorted((PACKAGE / folder).rglob("*")):
            if file.suffix in (".py", ".json", ".gz") and file.is_file():
                data = file.read_bytes()
                total.update(json.dumps([file.relative_to(PACKAGE).as_posix(), len(data)]).encode())
                total.update(data)
    return total.hexdigest()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _result(record: dict[str, Any]) -> ScanResult:
    return ScanResult(
        findings=tuple(_finding(finding) for finding in record["findings"]),
        skipped=tuple(Skipped(**{**entry, "reason": SkipReason(entry["reason"])}) for entry in record["skipped"]),
        num_scanned=record["num_scanned"],
        limits=tuple(record["limits"]),
        suppressed=tuple(_finding(finding) for finding in record["suppressed"]),
    )


def _finding(record: dict[str, Any]) -> Finding:
    fix, claim = record["fix"], record["claim"]
    return Finding(
        **{
            **record,
            "span": Span(**record["span"]),
            "severity": Severity(record["severity"]),
            "confidence": Confidence(record["confidence"]),
            "evidence": tuple(record["evidence"]),
            "fix": _fix(fix) if fix is not None else None,
            "claim": Claim(Ask(claim["ask"]), claim["what"]) if claim is not None else None,
        }
    )


def _fix(record: dict[str, Any]) -> Fix:
    return Fix(
        edits=tuple(Edit(**edit) for edit in record["edits"]),
        applicability=Applicability(record["applicability"]),
        reason=record["reason"],
        imports=tuple(Import(**needed) for needed in record["imports"]),
        since=record["since"],
    )
