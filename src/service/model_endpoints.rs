//! gRPC endpoints of single models: the list of open endpoints, and the channel that opens and closes them while the
//! server runs. A call over such an endpoint carries its model's name and can use no other model, so that contracts
//! without a model field work with several models.
//! Not here: serving the endpoints (`server`), and the configuration that opens them.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use tokio::net::TcpListener;
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};
use tower_layer::Layer;
use tower_service::Service;

/// The open endpoints of single models. Shared by the server, which serves them, and by the code that opens, closes and
/// shows them.
#[derive(Debug)]
pub struct ModelEndpoints {
    /// The address of each open endpoint, by the model's name.
    open: Mutex<BTreeMap<String, SocketAddr>>,
    /// Changes for the server. Unbounded, because each is caused by a change of the configuration.
    changes: UnboundedSender<EndpointChange>,
    /// The receiving end of the channel, until the server takes it.
    inbox: Mutex<Option<UnboundedReceiver<EndpointChange>>>,
}

/// A change of the endpoints, for the server to apply.
#[derive(Debug)]
pub(super) enum EndpointChange {
    /// Serve this model on this listener.
    Open(String, TcpListener),
    /// Close this model's endpoint to new calls.
    Close(String),
}

impl ModelEndpoints {
    /// Creates a set without endpoints.
    pub fn new() -> Arc<ModelEndpoints> {
        let (changes, inbox) = mpsc::unbounded_channel();
        Arc::new(ModelEndpoints { open: Mutex::default(), changes, inbox: Mutex::new(Some(inbox)) })
    }

    /// Opens an endpoint for the model with this name, or replaces the existing one. The server serves it as soon as it
    /// runs; the model need not be loaded.
    ///
    /// # Errors
    /// If the listener has no address.
    pub fn open(&self, model: &str, listener: TcpListener) -> std::io::Result<SocketAddr> {
        let address = listener.local_addr()?;
        self.locked().insert(model.to_owned(), address);
        // A server that has ended needs no change.
        let _ = self.changes.send(EndpointChange::Open(model.to_owned(), listener));
        Ok(address)
    }

    /// Closes the endpoint of the model with this name, if it has one. Running streams continue.
    pub fn close(&self, model: &str) {
        if self.locked().remove(model).is_some() {
            let _ = self.changes.send(EndpointChange::Close(model.to_owned()));
        }
    }

    /// Returns the address of the endpoint of the model with this name, if it has one.
    pub fn address(&self, model: &str) -> Option<SocketAddr> {
        self.locked().get(model).copied()
    }

    /// Returns the receiving end of the channel; `None` after the first call.
    pub(super) fn changes(&self) -> Option<UnboundedReceiver<EndpointChange>> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn locked(&self) -> MutexGuard<'_, BTreeMap<String, SocketAddr>> {
        // Each change is a single operation.
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The model of the endpoint over which a call came. It is in the call's extensions, except for calls over the endpoint
/// of all models.
#[derive(Clone, Debug)]
pub(super) struct OnlyModel(pub(super) Arc<str>);

/// A layer that stores the model of the endpoint in the extensions of each call, if the endpoint belongs to a single
/// model.
#[derive(Clone, Debug)]
pub(super) struct OfModel(pub(super) Option<Arc<str>>);

impl<S> Layer<S> for OfModel {
    type Service = Bound<S>;

    fn layer(&self, inner: S) -> Bound<S> {
        Bound { model: self.0.clone(), inner }
    }
}

/// A service behind [`OfModel`].
#[derive(Clone, Debug)]
pub(super) struct Bound<S> {
    model: Option<Arc<str>>,
    inner: S,
}

impl<B, S: Service<http::Request<B>>> Service<http::Request<B>> for Bound<S> {
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, mut request: http::Request<B>) -> S::Future {
        if let Some(model) = &self.model {
            request.extensions_mut().insert(OnlyModel(Arc::clone(model)));
        }
        self.inner.call(request)
    }
}
