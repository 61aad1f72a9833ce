"""The local disk: found, proven blank or ours, prepared and mounted. State is on the disk, never elsewhere.

settings   the settings that the role wrote
find       which disks are local                              (reads /sys and /dev/disk)
probe      what is on them                                    (reads; mounts nothing foreign)
decide     what to do, as a table                             (pure)
apply      carries the decision out                           (only it and arrays write to disks)
layout     bytes on disks: superblocks, and the pages that mark an erasure or a format in progress
arrays     several disks as one array, and missing members
azure      a disk as Azure delivers it: with a readme
ntfs       the names in an NTFS volume's root directory
"""
