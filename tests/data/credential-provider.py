#!/usr/bin/python3
"""A stand-in for Azure's image credential provider; its argument is azure.json.

It speaks the kubelet's protocol (credentialprovider.kubelet.k8s.io/v1) and asks the metadata service for the identity
that azure.json names, as Azure's does. In place of Azure's exchange of that for a registry's token, the lab's registry
takes the identity's token as the password. An image called `fails`, `hangs` or `foreign` makes it do that.
"""

import json
import sys
import time
import urllib.parse
import urllib.request

API_VERSION = "credentialprovider.kubelet.k8s.io/v1"
IMDS = "http://169.254.169.254/metadata/identity/oauth2/token"
# Whom Azure's registry calls who has a token.
NOBODY = "00000000-0000-0000-0000-000000000000"


def main() -> None:
    asked = json.load(sys.stdin)
    if (asked["kind"], asked["apiVersion"]) != ("CredentialProviderRequest", API_VERSION):
        sys.exit(f"unknown request: {asked}")
    registry, _, repository = asked["image"].partition("/")
    name = repository.rpartition("/")[2].partition(":")[0]
    if name == "fails":
        sys.exit("the metadata service gives no identity to this machine")
    if name == "hangs":
        time.sleep(3600)
    answer = {
        "kind": "CredentialProviderResponse",
        "apiVersion": "credentialprovider.kubelet.k8s.io/v9" if name == "foreign" else API_VERSION,
        "cacheKeyType": "Image",
        "cacheDuration": "10m0s",
        "auth": {registry: {"username": NOBODY, "password": identity(sys.argv[1])}},
    }
    json.dump(answer, sys.stdout)


def identity(path: str) -> str:
    """Return the token of the identity that azure.json names."""
    with open(path, encoding="utf-8") as file:
        config = json.load(file)
    if config["cloud"] != "AzurePublicCloud" or not config["tenantId"]:
        sys.exit(f"{path}: no cloud that this program knows, or no tenant")
    if not config["useManagedIdentityExtension"]:
        sys.exit(f"{path}: no identity of the machine's")
    query = {"api-version": "2018-02-01", "resource": "https://management.azure.com/"}
    query["client_id"] = config["userAssignedIdentityID"]
    address = f"{IMDS}?{urllib.parse.urlencode(query)}"
    request = urllib.request.Request(address, headers={"Metadata": "true"})
    with urllib.request.urlopen(request, timeout=10) as response:
        return str(json.load(response)["access_token"])


if __name__ == "__main__":
    main()
