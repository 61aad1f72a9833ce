"""What stands for Azure: Resource Manager as a state machine, and the import host of managed disks before Azurite.

Nothing here was compared with Azure itself. Shapes are those of the REST reference and of Azure's own SDK, with whose
models ``test_arm_contract.py`` reads every answer and every request; limits and refusals are those that documentation,
azcopy's source and reports name. docs/how-to/publish.md lists what only an account can answer.
"""
