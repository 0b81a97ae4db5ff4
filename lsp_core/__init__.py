"""The method: tensor math on torch modules, and the compressed model class."""
