"""The laboratory: a nemesis, a history and its checker, hosts in network namespaces, the fuzz."""
