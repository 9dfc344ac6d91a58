//! One round trip of the same rail: a check of an object's version, through the engine, as a warm read makes one.

use crate::Failed;
use crate::report::median;
use railfs_engine::client::{Client, Config, Found, Object};
use railfs_proto::name::ObjectName;
use std::sync::Arc;
use std::time::Instant;

const CHECKS: usize = 5000;

/// A client of its own and an object that nobody changes.
#[derive(Debug)]
pub struct Session {
    client: Arc<Client>,
    object: Arc<Object>,
}

impl Session {
    /// Connects and looks the object up.
    ///
    /// # Errors
    /// The engine's.
    pub fn open(address: &str, namespace: &str, key: &str) -> Result<Session, Failed> {
        let config = Config { addresses: vec![address.to_owned()], arena: 16 << 20, ..Config::default() };
        let client = Client::connect(config).map_err(|error| error.to_string())?;
        let name = ObjectName::new(namespace, key.as_bytes().to_vec()).map_err(|error| error.to_string())?;
        match Client::wait(|done| client.lookup(&name, done)) {
            Ok(Found::Object(object)) => Ok(Session { client, object }),
            Ok(_) => Err(format!("{name} is not there")),
            Err(error) => Err(error.to_string()),
        }
    }

    /// Microseconds of one check, one after another: the median of thousands.
    ///
    /// # Errors
    /// A check failed.
    pub fn median(&mut self) -> Result<f64, Failed> {
        let mut times = Vec::with_capacity(CHECKS);
        for _ in 0..CHECKS {
            let began = Instant::now();
            Client::wait(|done| self.client.check(&self.object, done)).map_err(|error| error.to_string())?;
            times.push(began.elapsed().as_secs_f64() * 1e6);
        }
        Ok(median(times))
    }

    /// Ends it.
    pub fn close(&self) {
        self.client.close();
    }
}
