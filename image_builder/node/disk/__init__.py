"""The local disk: found, proven blank or ours, made ready and mounted. State is on the disk, never elsewhere.

settings   what the role wrote
find       which disks are local ones                         (reads /sys and /dev/disk)
probe      what is on them                                    (reads; mounts nothing foreign but the platform's)
decide     what is to be done, a table                        (pure)
apply      does it                                            (the only module that writes to a disk)
layout     bytes on disks: superblocks, the page of an erasure that was begun
arrays     several disks as one, and members that are missing
azure      a disk as Azure hands it out; its readme is in ntfs's root directory
"""
