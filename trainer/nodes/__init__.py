"""A fleet: sessions on the nodes of a Ray cluster, recorded into one run."""
