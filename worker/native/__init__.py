"""CPU kernels in C++: attention over pages, whole decoder layers, products with packed weights."""
