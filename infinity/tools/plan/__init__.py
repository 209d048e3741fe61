"""`infinity plan`: models of machines, clusters and meshes."""
