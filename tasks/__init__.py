"""One file a stage: load the inputs by reference, call lsp_core, publish the output."""
