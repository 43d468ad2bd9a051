# SPDX-License-Identifier: Apache-2.0
"""Ways to resume an optimizer side by side, on the same inputs, in one run: ``nox -s peers``.

``loaders`` has the ways, ``rows`` the inputs, ``outcome`` what came of one, ``side`` runs them in a release's own
process, ``measure`` times them in turns, ``report`` and ``figures`` make the page and its pictures from the data.
"""

from __future__ import annotations

from ci.regress import REPOSITORY

PAGE = REPOSITORY / "docs" / "peers.md"
DATA = REPOSITORY / "docs" / "peers.json"
FIGURES = REPOSITORY / "docs" / "figures"
