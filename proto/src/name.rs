//! name
