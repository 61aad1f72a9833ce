"""A stand-in for Azure: Resource Manager as a state machine, and managed disks' import host in front of Azurite.

Nothing here was compared with Azure itself. Shapes follow the REST reference and Azure's own SDK: ``test_arm.py`` and
``test_arm_scale_sets.py`` read every request and answer with the SDK's models. Limits and refusals come from the
documentation, azcopy's source and reports. docs/how-to/publish.md lists the questions that only an account can answer.
"""
