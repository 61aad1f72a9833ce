"""What stands for Azure: Resource Manager as a state machine, and the import host of managed disks before Azurite.

Nothing here was compared with Azure itself. Shapes are those of the REST reference and of Azure's own SDK: by its
models ``test_arm.py`` reads every answer and every request, and its typed operations go through in
``test_arm_contract.py``. Limits and refusals are those that documentation, azcopy's source and reports name.
docs/how-to/publish.md lists what only an account can answer.
"""
