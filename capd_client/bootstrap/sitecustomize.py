"""What Python imports at its start in a job of `capd run`, in the place of the job's own sitecustomize.

It lets `_capd_startup` wait for torch, takes itself away, and has the job's own imported as if this one had never been
here: found, missing or failing, it looks as without capd. Every Python that the job starts comes through here, other
versions and other tools' too, so this file keeps to the syntax that all of them can read.
"""

import os
import sys

try:
    if sys.version_info >= (3, 10) and os.environ.get("CAPD_ENDPOINT", "").strip().lower() not in ("", "off"):
        import _capd_startup

        _capd_startup.begin()
except Exception as error:
    if os.environ.get("CAPD_LOG", "").lower() == "debug":
        sys.stderr.write("capd: start-up: %r\n" % (error,))

_here = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [entry for entry in sys.path if entry != _here]
sys.modules.pop("sitecustomize", None)

import sitecustomize  # the job's own; where it has none, `site` knows what this error means
