//! `railfsd`, the railfs storage server, as a library.
//!
//! Arrows point one way: `daemon` -> `control`, `serve`, `put` -> `catalog` -> `store`; `fsck` and `replace` stand beside `daemon`.

#![forbid(unsafe_code)]

pub mod access;
pub mod admin;
pub mod catalog;
pub mod config;
pub mod control;
pub mod daemon;
pub mod fsck;
pub mod health;
pub mod listeners;
pub mod manager;
pub mod manual;
pub mod node;
pub mod put;
pub mod reload;
pub mod replace;
pub mod scarce;
pub mod serve;
pub mod share;
pub mod store;
