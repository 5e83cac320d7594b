"""What can go wrong in the page index.

    PageIndexError
    ├── IndexUnavailableError   Redis cannot be reached, or did not answer in time
    │   ├── IndexNotAskedError  Redis was away a moment ago, and was not asked
    │   ├── IndexUncertainError Redis went away while something was done, which may be done or not
    │   ├── IndexDeniedError    Redis does not take the user or password
    │   └── IndexRefusedError   Redis answered that it will not do what was asked
    │       └── IndexStrangeError  a key holds something of another type than ours
    ├── PlaceFencedError        a later start of the same place has taken over
    └── ServerError             the embedded server did not start, or stopped by itself

Errors of the Redis client are translated in `pie.index.client` and nowhere else.
"""

from __future__ import annotations


class PageIndexError(Exception):
    """Anything that the page index raises."""


class IndexUnavailableError(PageIndexError):
    """Redis cannot be reached, or did not answer in time."""


class IndexNotAskedError(IndexUnavailableError):
    """Redis was away a moment ago, and was not asked: what was to be done is certainly not done."""


class IndexUncertainError(IndexUnavailableError):
    """Redis went away while it was asked: whether what was to be done is done nobody knows."""


class IndexDeniedError(IndexUnavailableError):
    """Redis does not take the user or password; waiting does not help, unless they are changed there."""


class IndexRefusedError(IndexUnavailableError):
    """Redis answered that it will not do what was asked; asking the same again may not help."""


class IndexStrangeError(IndexRefusedError):
    """A key of ours holds something of another type: somebody else has written there."""


class PlaceFencedError(PageIndexError):
    """A later start of the same place has taken over; this one may not publish any more."""


class ServerError(PageIndexError):
    """The embedded server did not start, or stopped by itself; the message says why."""
