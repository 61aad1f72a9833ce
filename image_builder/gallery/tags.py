"""The tags that publishing puts on versions and disks; machines created from them may have them too.

They have their own module because a rollout reads them as well, and knows nothing else about publishing.
"""

from __future__ import annotations

BUILD_TAG = "image-builder-build"
SHA256_TAG = "image-builder-vhd-sha256"
LOCK_TAG = "image-builder-lock-sha256"
SUITE_TAG = "image-builder-suite"
DEFINITION_TAG = "image-builder-definition"
# The value of these is the reason.
PROMOTED_TAG, WITHDRAWN_TAG = "image-builder-promoted", "image-builder-withdrawn"
UNVERIFIED_TAG = "image-builder-unverified"
