//! How many streams of the services beside the control plane (health, reflection) are open.
//!
//! Guarantees: over all connections of a server together no more than a limit; one more is refused by its number, with
//! RESOURCE_EXHAUSTED. A place comes back with the end of its stream, whichever side ends it. Calls that are one question and one
//! answer have no limit of their own, so that whoever asks now and then whether the server is well is always told.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::{Body as HttpBody, BoxFuture, Service, http};
use tonic::server::NamedService;

/// Most streams of health and reflection at a time.
pub const MAX_STREAMS: usize = 256;
/// Calls of these services that are one question and one answer.
const SINGLE: [&str; 2] = ["/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/List"];

/// The places there are.
#[derive(Clone, Debug)]
pub struct Places {
    free: Arc<Semaphore>,
    limit: usize,
}

impl Places {
    /// So many.
    pub fn new(limit: usize) -> Places {
        Places { free: Arc::new(Semaphore::new(limit)), limit }
    }

    fn take(&self) -> Result<OwnedSemaphorePermit, Status> {
        Arc::clone(&self.free).try_acquire_owned().map_err(|_| {
            Status::resource_exhausted(format!(
                "{} streams of health and reflection are open, the most there may be: end one, or ask with Check",
                self.limit
            ))
        })
    }
}

/// A service whose streams take a place each.
#[derive(Clone, Debug)]
pub struct Bounded<S> {
    service: S,
    places: Places,
}

impl<S> Bounded<S> {
    /// All services with the same places share them.
    pub fn new(service: S, places: Places) -> Bounded<S> {
        Bounded { service, places }
    }
}

impl<S: NamedService> NamedService for Bounded<S> {
    const NAME: &'static str = S::NAME;
}

impl<S, B> Service<http::Request<B>> for Bounded<S>
where
    S: Service<http::Request<B>, Response = http::Response<Body>, Error = Infallible>,
    S::Future: Send + 'static,
{
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Self::Response, Infallible>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.service.poll_ready(context)
    }

    fn call(&mut self, request: http::Request<B>) -> Self::Future {
        if SINGLE.contains(&request.uri().path()) {
            return Box::pin(self.service.call(request));
        }
        match self.places.take() {
            Err(refused) => Box::pin(std::future::ready(Ok(refused.into_http()))),
            Ok(place) => {
                let answer = self.service.call(request);
                Box::pin(async move { Ok(answer.await?.map(|body| Body::new(Placed { body, _place: place }))) })
            }
        }
    }
}

/// The answer of a stream; its place is free when it is dropped.
struct Placed {
    body: Body,
    _place: OwnedSemaphorePermit,
}

impl HttpBody for Placed {
    type Data = <Body as HttpBody>::Data;
    type Error = <Body as HttpBody>::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<http_body::Frame<Self::Data>, Self::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> http_body::SizeHint {
        self.body.size_hint()
    }
}
