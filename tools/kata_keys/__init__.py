"""Make kata/keys.json from the release tags of kata-containers/kata-containers."""
