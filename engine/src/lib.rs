//! The railfs transfer engine.
