"""Signed values in the store: only a process that knows the run's secret can have written one.

A stored value is the HMAC-SHA256 of its key and its text, in hexadecimal, and then the text:

    value = HMAC(secret, key | text) | text

The key is part of what is signed, so a value that was written for one key is worth nothing under
another. That a value is the newest one of its key is not in the signature: counters in the text
(of changes, of beats, of sync rounds) say so, and whoever reads looks at them.

A value that is not signed, or is not what a member writes there, is ignored, counted and logged.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os

VARIABLE = "MANYHANDS_SECRET"
SHORTEST = 16  # characters of a secret
UNSIGNED = "it is not signed with the secret of this run"
DIGITS = hashlib.sha256().digest_size * 2

log = logging.getLogger("manyhands")


class Signer:
    """Sign and verify the values of one run."""

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()
        self.ignored = 0  # values that no member can have written

    @classmethod
    def from_environment(cls, secret: str | None = None) -> Signer:
        """The signer of the secret that is given, or else of the environment's."""
        secret = secret or os.environ.get(VARIABLE, "")
        if not secret:
            raise ValueError(
                "a crew's workers sign what they write to the store, and got no secret to sign it "
                f"with. Set {VARIABLE} to the same text for all workers of the run, such as "
                '`python -c "import secrets; print(secrets.token_hex())"` prints (`manyhands run` '
                "makes one for the workers of one host)."
            )
        if len(secret) < SHORTEST:
            raise ValueError(
                f"the secret of a run ({VARIABLE}) must have at least {SHORTEST} characters, got "
                f"{len(secret)}: anybody could try all shorter ones."
            )
        return cls(secret)

    def sign(self, key: str, text: str) -> str:
        """The value to store under this key."""
        return self._code(key, text.encode()) + text

    def opened(self, key: str, value: bytes) -> str | None:
        """The text of a stored value; None if no member has written it under this key."""
        code, text = value[:DIGITS], value[DIGITS:]
        right = hmac.compare_digest(code, self._code(key, text).encode())
        return text.decode() if right else None

    def verified(self, key: str, value: bytes) -> str | None:
        """As `opened`; a value that no member has written is counted and logged."""
        text = self.opened(key, value)
        if text is None:
            self.ignore(key, UNSIGNED)
        return text

    def ignore(self, key: str, why: str) -> None:
        """Count a value that is ignored, and log it; of many only the 1st, 2nd, 4th, 8th, ..."""
        self.ignored += 1
        if self.ignored & (self.ignored - 1) == 0:
            log.warning(
                "a value in the store is ignored (%d so far): %r, because %s. A stranger writes to "
                "the store, or a worker has another secret.",
                self.ignored,
                key,
                why,
            )

    def _code(self, key: str, text: bytes) -> str:
        message = f"{len(key)}|{key}|".encode() + text
        return hmac.new(self._secret, message, hashlib.sha256).hexdigest()
